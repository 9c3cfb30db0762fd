"""The tokens of one pass over a corpus, for --num_epochs."""

from nanochat.device import Device
from nanochat.ground.cli import UserError
from nanochat.ground.corpus import Corpus, WeightedCorpora
from nanochat.ground.screen import track
from nanochat.loader import tokenize
from nanochat.ranks import gather_values
from nanochat.tokenizer import Tokenizer


def count_tokens(corpus: Corpus | WeightedCorpora, tokenizer: Tokenizer, device: Device, workers: int = 1) -> int:
    """The tokens of a corpus, with a begin token for each document. Each rank counts some of the blocks.

    Raises UserError: when the corpus has no end, or is a mixture by weight, of which a pass is not defined.
    """
    blocks = corpus.block_count()
    if isinstance(corpus, WeightedCorpora) or blocks is None:
        why = "is drawn by weight" if isinstance(corpus, WeightedCorpora) else "never ends"
        raise UserError(f"--num_epochs: --data {corpus.name} {why}, so it has no passes: set --num_iterations")
    total = 0
    for index in track(range(device.rank, blocks, device.world_size), "counting tokens"):
        total += sum(map(len, tokenize(corpus.read_block(index), tokenizer, workers)))
    return sum(gather_values(total, device))
