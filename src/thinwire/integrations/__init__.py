"""Bridges from other people's trainers to `thinwire.Replica`: a module a library. Importing this package loads none of them.

huggingface   transformers' `Trainer`, and TRL's trainers
accelerate    a loop of accelerate, where its own `LocalSGD` stands
lightning     Lightning's `Trainer`
torchtitan    torchtitan's trainer
"""
