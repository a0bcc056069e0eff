"""`thinwire ternary NUMBER ...`"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from thinwire.errors import ConfigurationError
from thinwire.rng import Key
from thinwire_ternary.codec import Ternary


def main(arguments: Sequence[str]) -> int:
    """Print what the numbers become. Returns the exit code."""
    given = [argument for argument in arguments if argument != "--json"]
    try:
        x = torch.tensor([float(number) for number in given])
    except ValueError:
        raise ConfigurationError(f"{' '.join(given)}: numbers are needed, such as 0.3 -1 0.1 2.") from None
    codec, out = Ternary(), torch.zeros(len(x))
    payload = torch.empty(codec.nbytes(len(x)), dtype=torch.uint8)
    codec.encode(x, payload, Key())
    codec.decode_add(payload, out, Key())
    print(json.dumps({"values": out.tolist(), "nbytes": len(payload)}) if "--json" in arguments else out.tolist())
    return 0
