"""What a model may call, and the jail for code that it wrote."""
