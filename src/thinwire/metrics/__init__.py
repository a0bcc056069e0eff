"""What a run records, told to the trackers that people look at: `--log wandb,mlflow,tensorboard,prometheus,jsonl`."""
