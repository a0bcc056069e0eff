"""transformers' Trainer with a process for each replica: the usual script and one callback.

python examples/10_hugging_face_trainer.py                                           # starts two processes here
torchrun --nproc-per-node 2 examples/10_hugging_face_trainer.py --out runs/trainer   # the same, by hand
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import thinwire as tw
from thinwire.integrations.huggingface import ThinwireCallback

LENGTH = 64


class Windows(torch.utils.data.Dataset):
    """The bytes of this repository's README, in windows."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH, LENGTH // 4)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(out: str, steps: int, resume: bool) -> None:
    set_seed(0)
    shape = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    text = (Path(__file__).parents[1] / "README.md").read_bytes()
    arguments = TrainingArguments(
        out,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        save_steps=max(1, steps // 2),
        eval_strategy="steps",
        eval_steps=max(1, steps // 2),
        logging_steps=max(1, steps // 4),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Windows(text[1000:]),
        eval_dataset=Windows(text[:1000]),
        callbacks=[ThinwireCallback(tw.streaming_diloco(every=10, delay=2))],  # the one new line
    )
    trainer.train(resume_from_checkpoint=resume)
    checksum = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
    print(f"replica {os.environ.get('RANK', '0')}: step {trainer.state.global_step}, sum of |weights| {checksum:.9f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/trainer", help="for checkpoints (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=80, help="inner steps of each replica (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.out, options.steps, options.resume)
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.call([*torchrun, *sys.argv], env=os.environ | {"OMP_NUM_THREADS": "1"}))


if __name__ == "__main__":
    main()
