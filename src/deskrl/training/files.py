"""Names of what lies in a run folder, for everything that reads or writes one. Imports nothing."""

CONFIG_FILE = "config.yaml"
ERROR_FILE = "error.json"
LOG_FILE = "logs/train.log"
CHECKPOINTS = "checkpoints"
