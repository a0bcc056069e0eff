"""Bridges from other trainers to `thinwire.Replica`, one module for each library. Importing this package loads none of them.

huggingface   transformers' `Trainer`, and TRL's trainers
accelerate    a loop of accelerate, in place of its own `LocalSGD`
lightning     Lightning's `Trainer`
torchtitan    torchtitan's trainer
"""
