"""What a right result of float32 sums may lose: numbers that the benchmark's gate and the tests share. No torch."""

from __future__ import annotations

# Times what the same formula loses in plain float32. Accepts another order of the same sums; rejects a term computed at
# lower precision (CONTRIBUTING.md, Tests).
FACTOR = 2.0

# Accepts the last bit of a float32 result as large as the largest of its tensor; rejects a sum of 16-bit products.
FLOAT32_STEP = 2.0**-23
