"""m3rl: GRPO post-training of MiniMax-M3."""
