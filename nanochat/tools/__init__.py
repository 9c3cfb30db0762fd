"""The tools that a model may call, and the jail for model-written code."""
