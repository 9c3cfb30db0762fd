"""How much of the replies in a data set SFT learns, for its log and for the preview."""

import itertools
import re
from collections.abc import Sequence

from nanochat.conversation import Rendered
from nanochat.ground.log import counted, doubt, print0
from nanochat.tokenizer import Tokenizer

EMPTY_THOUGHT = re.compile(r"\s*(<think>)?\s*</think>")  # a prompt may have its first mark
LEARNED_SHARE = 0.9  # the least share of replies and of their tokens that is learned without a warning


def report_learned(rendered: Sequence[Rendered], tokenizer: Tokenizer, strict_data: bool = False) -> None:
    """Print which share of the replies in some conversations is learned, and of their tokens; warn under 90%.

    The rest is cut off at the context, or a chat template writes it as the model would not. Another line says how many
    replies have only the empty thought that a template such as Qwen3's writes where data have none.
    """
    replies = sum(one.replies for one in rendered)
    tokens = sum(one.reply_tokens for one in rendered)
    if not replies or not tokens:
        return
    dropped = sum(one.replies - one.unlearned for one in rendered if not one.ids)
    reply_share = 1 - (sum(one.unlearned for one in rendered) + dropped) / replies
    token_share = sum(one.target_count for one in rendered) / tokens
    conversations = counted(sum(one.replies > 0 for one in rendered), "conversation")
    line = f"learned: {reply_share:.1%} of the replies and {token_share:.1%} of their tokens, in {conversations}"
    empty = 0
    ends = 0
    for one in rendered:
        learned = [token for token, is_target in zip(one.ids, one.mask, strict=True) if is_target]
        for is_learned, pairs in itertools.groupby(zip(one.ids, one.mask, strict=True), key=lambda pair: pair[1]):
            reply = tokenizer.decode([token for token, _ in pairs]) if is_learned else ""
            empty += EMPTY_THOUGHT.match(reply) is not None
        ends += sum(token in tokenizer.reply_ends for token in learned)
    if not ends and token_share > 0:
        problem = "no reply is learned with a token that ends it (eos_token_id): the model would not learn to stop"
        doubt(problem, strict_data)
    if empty:
        print0(
            f"{empty:,} of {replies:,} replies have no thought: the chat template writes an empty one, which is learned"
        )
    cut = sum(one.cut for one in rendered)
    too_long = ""
    if any(one.cut and not one.ids for one in rendered):
        too_long = f"{counted(cut, 'text')} longer than --max_seq_len left out: --too_long cut learns the beginning"
    elif cut:
        too_long = f"{counted(cut, 'text')} cut at --max_seq_len: raise it"
    if min(reply_share, token_share) >= LEARNED_SHARE:
        print0("; ".join(filter(None, [line, too_long])))
        return
    causes = []
    if any(one.unlearned for one in rendered):
        causes.append(
            "the chat template writes the others not as the model would, such as without their thoughts or calls, or "
            "does not mark them: name one that marks replies with {% generation %} (--chat_template FILE)"
        )
    causes += filter(None, [too_long])
    doubt("; ".join([line, *causes, "python -m scripts.preview shows what is learned"]), strict_data)
