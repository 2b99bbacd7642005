"""Names of what the agent leaves in a trial's `agent` folder. Imports nothing."""

TRAJECTORY_FILE = "trajectory.json"
"""The conversation; what the grader reads."""
TOKENS_FILE = "tokens.npz"
"""The token ledger; only where a token policy sampled."""
HARNESS_FILES = (TRAJECTORY_FILE, TOKENS_FILE)
"""Written by the harness, outside the sandbox: nothing from inside may replace them."""
