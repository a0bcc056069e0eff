"""Sends the metrics of a run to trackers: `--log wandb,mlflow,tensorboard,prometheus,jsonl`."""
