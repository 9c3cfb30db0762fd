"""Our models in EleutherAI's lm-evaluation-harness (the package lm_eval), whose tasks the field's papers report.

The harness writes prompts as texts and turns answers into metrics. A model answers three kinds of request:

    loglikelihood            how likely is this continuation of that context, and would greedy decoding write it
    loglikelihood_rolling    how likely is this whole text, in windows as long as the model's context
    generate_until           which text does the model write after this one, up to a stop text

The numbers equal the ones from the harness's `hf` model on a folder that `scripts.export --to hf` writes. So texts are
encoded as in transformers: a special token that is spelled out in a text becomes that token. This is how the harness
passes a rendered chat on. A calculator call of our models is answered here; the `hf` model does not answer it.

Source: Gao et al. 2024, The Language Model Evaluation Harness (the interface, the windows, what `hf` adds and cuts).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanochat.cli import UserError
from nanochat.collectives import gather_values
from nanochat.conversation import Message, parse_reply, render_prompt, text_of
from nanochat.device import Device
from nanochat.engine import Engine
from nanochat.evals.core import ScoredText, batches, score_texts
from nanochat.exported.tokenizer_files import tokenizer_files
from nanochat.families.imported_tokenizer import ImportedTokenizer
from nanochat.gpt import GPT
from nanochat.sampling import NEUTRAL, SamplingParams, seed_of
from nanochat.screen import bar, track
from nanochat.tokenizer import Tokenizer, replace_surrogates

REPLY_TOKENS = 256  # for a task that does not limit its replies; `hf` has the same


class Tasks(TaskManager):
    """The harness's tasks and the tasks in `include_path`; one that cannot be loaded costs one line."""

    def load(self, task_list: Any) -> Any:
        try:
            loaded = super().load(task_list)
        except Exception as error:  # each library below raises other kinds for data that is out of reach
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
            hint = "its data come from the hub: HF_ENDPOINT selects a mirror, or name local tasks with --include_path"
            raise UserError(f"--tasks: {problem}; {hint}") from error
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                problem = "it shows pictures, or runs what the model writes without a sandbox"
                raise UserError(f"--tasks {name}: {problem}; leave it out")
        return loaded


@dataclass(frozen=True)
class Wanted:
    """A reply that the harness requests."""

    number: int  # its request's number
    prompt: list[int]
    max_tokens: int
    stops: list[str]  # the reply ends before the first of them
    sampling: SamplingParams


class NanochatLM(TemplateLM):
    """A model as the harness sees one.

    Every rank calls it with all requests and gets all answers; the ranks share the work. The harness has its own way to
    do that (`world_size`), which stays at one process here: its ranks would exchange pickles.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        device: Device,
        batch_rows: int,
        graphs: Literal["auto", "on", "off"] = "auto",
        seed: int = 0,
    ):
        """`batch_rows` texts or replies are computed at once; `seed` is for tasks that draw their replies."""
        super().__init__()
        self.model = model
        self.engine = Engine(model, tokenizer, device, graphs)
        self.batch_rows = batch_rows
        self.seed = seed
        self.context = model.config.sequence_len
        self._tokenizer = tokenizer  # `tokenizer` is one of transformers, in this interface
        # In `tokenizer` text never becomes a special token. This one reads text like transformers, with the same ids.
        files = tokenizer_files(tokenizer, self.context, for_others=True)
        self._library = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
        self._prefix = tokenizer.get_bos_token_id()
        if isinstance(tokenizer, ImportedTokenizer):  # Qwen has none: `hf` takes the token that ends a text
            self._prefix = tokenizer.special_ids.get(tokenizer.names.get("bos_token", ""), tokenizer.text_end)
        # Llama and our models have it before each text, Qwen has not.
        adds_bos = files["tokenizer_config.json"].get("add_bos_token")
        self.adds_bos = self._library.encode("").ids[:1] == [self._prefix] if adds_bos is None else bool(adds_bos)

    # ---------------------------------------------------------------------- texts

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.text_end

    @property
    def prefix_token_id(self) -> int:
        """The token from which the first token of a text is predicted."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, with the begin token, unless the text has it already or `add_special_tokens` is False."""
        string = replace_surrogates(string)
        begun = add_special_tokens is False or string.startswith(self._tokenizer.decode([self._prefix]))
        ids = [self._prefix] if self.adds_bos and not begun else []
        return ids + self._library.encode(string, add_special_tokens=False).ids

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """The text of a chat up to where the reply begins; or, without `add_generation_prompt`, of a chat whose last
        message is the beginning of the reply."""
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, ImportedTokenizer):
            return tokenizer.decode(render_prompt(tokenizer, chat_history))
        assert tokenizer.chat_template is not None, "the caller has looked at can_chat"
        begun = ""
        if not add_generation_prompt:
            begun = chat_history[-1]["content"]
            chat_history = chat_history[:-1]
        return tokenizer.chat_template.render(chat_history, add_generation_prompt=True).text + begun

    # ---------------------------------------------------------------------- how likely is a text

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        # Encodes each pair and hands it to `_loglikelihood_tokens`; there are bars of ours.
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """For each (anything, context, continuation) the continuation's logprob, and whether greedy decoding writes it.

        A context that is too long loses its beginning."""
        texts = []
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.context:
                problem = f"a continuation has {len(continuation)} tokens, the model's context {self.context}"
                raise UserError(f"--tasks: {problem}; leave that task out")
            # The last token is predicted and not read, so that one more than the context fits.
            tokens = [*context, *continuation][-(self.context + 1) :]
            texts.append(ScoredText(number, 0, tokens, len(tokens) - len(continuation)))
        texts.sort(key=lambda text: -len(text.tokens))  # where memory runs out, it does so at once
        device = self.engine.device
        together = list(batches(texts, self.context, self.batch_rows))
        scores: list[tuple[int, float, bool]] = []
        for length, batch in track(together[device.rank :: device.world_size], "batches"):
            losses = score_texts(self.model, batch, length, self.batch_rows, device)
            for text, (mean_loss, is_greedy) in zip(batch, losses, strict=True):
                count = len(text.tokens) - text.start
                scores.append((text.example, -mean_loss * count if count else 0.0, is_greedy))
        return [(logprob, is_greedy) for _, logprob, is_greedy in self._of_all_ranks(scores)]

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        windows = []
        owners = []  # for each window the number of its text
        for number, request in enumerate(requests):
            arguments: Any = request.args
            (text,) = arguments
            for pair in get_rolling_token_windows(self.tok_encode(text), self._prefix, self.context, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (logprob, _is_greedy) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += logprob
        return sums

    # ---------------------------------------------------------------------- what does the model write

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        wanted = [self._wanted(number, request) for number, request in enumerate(requests)]
        wanted.sort(key=lambda one: -len(one.prompt))
        device = self.engine.device
        replies = self._generate(wanted[device.rank :: device.world_size])
        return [text for _, text in self._of_all_ranks(replies)]

    def _wanted(self, number: int, request: Instance) -> Wanted:
        arguments: Any = request.args
        text, given = arguments
        settings: dict[str, Any] = {**normalize_gen_kwargs(given, REPLY_TOKENS)}
        max_tokens = settings["max_gen_toks"]
        room = self.context - max_tokens  # for the prompt, which loses its beginning
        if max_tokens < 1 or room < 1:
            problem = f"replies of up to {max_tokens} tokens, with a context of {self.context}"
            raise UserError(f"--tasks {request.task_name}: {problem}; set --gen_kwargs max_gen_toks=N")
        drawn = {name: settings[name] for name in NEUTRAL if name in settings}
        if not settings["do_sample"]:
            drawn["temperature"] = 0.0
        sampling = SamplingParams(**drawn, seed=seed_of(self.seed, number))
        prompt = self.tok_encode(text)[-room:] or [self._prefix]
        return Wanted(number, prompt, max_tokens, handle_stop_sequences(settings["until"], eos=None), sampling)

    def _generate(self, wanted: Sequence[Wanted]) -> list[tuple[int, str]]:
        """The replies, each with the number of its request."""
        made: list[list[int]] = [[] for _ in wanted]
        written = [bytearray() for _ in wanted]
        prompts = [one.prompt for one in wanted]
        sampling = [one.sampling for one in wanted]
        longest = max((one.max_tokens for one in wanted), default=0)
        with bar("replies", len(wanted)) as finished:
            settings = {"max_tokens": longest, "sampling": sampling, "max_rows": self.batch_rows}
            for new in self.engine.stream(prompts, **settings) if wanted else ():
                place = new.row.number
                finished.done += new.finish_reason is not None
                if new.finish_reason == "stop" or len(made[place]) == wanted[place].max_tokens:
                    continue
                made[place].append(new.id)
                # Where the output layer is wider than the vocabulary, as Qwen's, a token of its last rows has no text.
                if new.kind == "text" and new.id < self._tokenizer.vocab_size:
                    written[place] += self._tokenizer.token_texts[new.id]
                has_stop = any(stop and stop.encode() in written[place] for stop in wanted[place].stops)
                if has_stop or len(made[place]) == wanted[place].max_tokens:
                    new.row.max_tokens = 0  # the next token is its last
        replies = []
        for one, ids in zip(wanted, made, strict=True):
            text = text_of(parse_reply(self._tokenizer, ids))
            replies.append((one.number, postprocess_generated_text(text, one.stops, think_end_token=None)))
        return replies

    def _of_all_ranks(self, found: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """What the ranks have found, by the numbers that it begins with."""
        parts = gather_values(found, self.engine.device)
        return sorted((tuple(one) for part in parts for one in part), key=lambda one: one[0])
