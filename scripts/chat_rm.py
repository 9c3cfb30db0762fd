"""The old command for reward models: `python -m scripts.chat_dpo --loss reward` trains them now.

python -m scripts.chat_rm    # ends with a line that says so
"""

import sys

if __name__ == "__main__":
    print("error: a reward model is a loss of chat_dpo now: python -m scripts.chat_dpo --loss reward", file=sys.stderr)
    sys.exit(2)
