"""`slime serve` beyond one engine: replicas, weights that follow a run, and conversations that a run learns from."""
