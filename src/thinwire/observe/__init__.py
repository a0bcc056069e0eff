"""What a run records (`events`), reads back (`runs`), shows (`progress`) and draws (`report`)."""
