"""The cluster's side of jit-ckpt: hooks, the relauncher and the policy behind them. Standard library only."""
