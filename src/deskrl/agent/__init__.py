"""The agent: a loop between a model and the world's MCP tools, run by harbor as a `BaseAgent`."""
