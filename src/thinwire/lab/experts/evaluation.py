"""`thinwire evaluate` for an ensemble."""

from __future__ import annotations

from typing import Any

import torch

from thinwire.app.cli.evaluate import Options, batches, say_what_was_trained_on, scores
from thinwire.app.trainer.trained import with_parents
from thinwire.errors import ConfigurationError
from thinwire.lab.experts.ensemble import Ensemble

MIXTURE, MEAN = "mixture", "mean of weights"


def evaluated(ensemble: Ensemble, asked: Options) -> list[dict[str, Any]]:
    """The rows of `thinwire evaluate` for an ensemble: the mixture, each expert alone, and the mean of their weights."""
    if not asked.text:
        raise ConfigurationError(f"{asked.run} is an ensemble: text is needed; add --text FILE FILE, one row for each.")
    rows = list[dict[str, Any]]()
    say_what_was_trained_on([[one] for one in asked.text], with_parents(*ensemble.folders))
    domains, mean = [one.domain for one in ensemble.experts], ensemble.mean()
    prior = ensemble.cached_prior(asked.prior, asked.column or "text", asked.sequence) if asked.prior else None
    mixture = ensemble.mixture(prior)
    alone = dict(zip(domains, ensemble.models)) | ({MEAN: mean.model} if mean else {})
    for text in asked.text:
        found = scores(alone, batches(asked, (text,), ensemble.tokenizer, ensemble.sequence))
        of_experts = torch.stack([found[domain] for domain in domains])
        losses = {MIXTURE: mixture.mixed(of_experts)} | found
        after = mixture.posterior(of_experts)[..., -1].exp().mean(1)
        rows.append(
            {"text": text, "losses": {name: -float(one.mean()) for name, one in losses.items()}}
            | {"posterior": {domain: float(share) for domain, share in zip(domains, after)}}
            | {"prior": {domain: float(share) for domain, share in zip(domains, mixture.log_prior_K.exp())}}
        )
    return rows
