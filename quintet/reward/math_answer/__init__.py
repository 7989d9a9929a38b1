"""Reading and comparing final answers of mathematics. See `quintet.reward.math` for the conventions."""
