"""The policies' own constants, on the scale of small worlds."""

SMALL = {"SHORT_TOKENS": 16, "LEVELS": 4, "PATIENCE": 60, "PROMPT_TOKENS_PER_ITERATION": 8, "PARTS": 3}
