"""The bridge to transformers' `Trainer` under TRL's `SFTTrainer`, with adapters of peft."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import thinwire as tw
from thinwire.testing.toy import same_bits


@pytest.mark.slow
def test_one_replica_with_average_changes_nothing(tmp_path):
    """Law 11, also after a resume. The checkpoint holds only the adapters."""
    from trl_trainer import train, weights  # importing trl takes a second

    from thinwire.integrations.huggingface import ThinwireCallback

    due = weights(train(tmp_path / "bare", None))
    assert same_bits(weights(train(tmp_path / "attached", ThinwireCallback(tw.local_sgd(every=3)))), due)
    kept = load_file(tmp_path / "attached/checkpoint-4/thinwire/step-00000004/model.safetensors")
    assert kept and all(".lora_" in name or name.endswith((".bias", ".masked_bias")) for name in kept)
    shutil.rmtree(tmp_path / "attached/checkpoint-8")
    again = train(tmp_path / "attached", ThinwireCallback(tw.local_sgd(every=3)), resume=True)
    assert same_bits(weights(again), due)


@pytest.mark.slow
def test_two_processes_end_with_equal_weights(tmp_path):
    program = Path(__file__).parents[1] / "support/trl_trainer.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(program), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    zero, one = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert same_bits(zero["weights"], one["weights"]) and zero["unwrapped"] and one["unwrapped"]
    assert (tmp_path / "sft/replica-1/checkpoint-8/adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_completions_that_are_compared_over_all_processes_are_refused(tmp_path):
    from trl import GRPOConfig, GRPOTrainer
    from trl_trainer import Dataset as Rows
    from trl_trainer import GPT2Config, GPT2LMHeadModel, tokenizer

    from thinwire.integrations.huggingface import ThinwireCallback

    shape = {"vocab_size": 41, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    callback = ThinwireCallback(tw.local_sgd(every=3), tw.ThreadGroup.create(2)[0])
    with pytest.raises(tw.ConfigurationError, match=r"num_generations.*GRPO.*give a Membership and own_data=True"):
        GRPOTrainer(
            GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)),
            lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, bf16=False),
            train_dataset=Rows.from_list([{"prompt": "w1 w2"}] * 8),
            processing_class=tokenizer(),
            callbacks=[callback],
        )
