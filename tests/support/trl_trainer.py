"""Adapters on a tiny GPT-2 under TRL's `SFTTrainer`, on local texts. As a program it is one replica of two: `torchrun ... trl_trainer.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import thinwire as tw
from thinwire.integrations.huggingface import ThinwireCallback

STEPS = 8
WORDS = [f"w{index}" for index in range(40)]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["<end>", *WORDS])}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>", unk_token="<end>")


def train(folder: Path, callback: ThinwireCallback | None, resume: bool = False) -> SFTTrainer:
    set_seed(0)
    shape = {"vocab_size": 41, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    texts = [" ".join(WORDS[(index + step) % 40] for step in range(4 + index % 8)) for index in range(40)]
    trainer = SFTTrainer(
        GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)),
        SFTConfig(
            str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True,
            bf16=False, save_steps=4, logging_steps=4, disable_tqdm=True, max_length=16,
        ),
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True),
        callbacks=[callback] if callback else [],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: SFTTrainer) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters() if p.requires_grad])


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    trainer = train(folder / "sft", ThinwireCallback(tw.streaming_diloco(every=3, delay=1)))
    found = {"weights": weights(trainer), "unwrapped": trainer.model_wrapped is trainer.model}
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
