"""The tasks from which a chat model learns and on which it is graded: one file per task."""

PLUGS = {
    "tasks": {
        "spelling": "nanochat.tasks.spelling:Spelling",
        "letters": "nanochat.tasks.spelling:LetterCount",
        "tool_use": "nanochat.tasks.tool_use:ToolUse",
        "gsm8k": "nanochat.tasks.gsm8k:Gsm8k",
        "mmlu": "nanochat.tasks.mmlu:Mmlu",
        "arc_easy": "nanochat.tasks.arc:ArcEasy",
        "arc_challenge": "nanochat.tasks.arc:ArcChallenge",
        "humaneval": "nanochat.tasks.humaneval:HumanEval",
        "smoltalk": "nanochat.tasks.smoltalk:SmolTalk",
        "smoltalk_zh": "nanochat.tasks.smoltalk:SmolTalkChinese",
        # The content of a PATH without a task's name: its form stands in for a task.
        "conversations": "nanochat.tasks.conversations:Conversations",
        "prompts": "nanochat.tasks.conversations:Prompts",
        "pairs": "nanochat.tasks.preferences:Preferences",
    },
}
