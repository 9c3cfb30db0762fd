"""What a chat model learns from and is graded on: one file a task."""
