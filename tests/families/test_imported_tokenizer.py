"""Other families' tokenizers: what ends a reply, one file that holds everything, and hostile files in one line.

tests/promises/test_p08_interchange_is_exact.py compares ids and texts with transformers.
"""

import base64
import json
import pickle
import random
import shutil

import pytest
from tiny import complaint
from tiny_families import FAMILIES, random_string, save_family

from nanochat.tokenizer import Tokenizer

KINDS = ("qwen2", "llama3", "mistral", "metaspace")  # the others differ only in their template


@pytest.mark.parametrize("family", KINDS)
def test_bytes_of_tokens(family_tokenizers, family):
    tokenizer = family_tokenizers[family]
    assert tokenizer.decode(tokenizer.encode("从前有 a boat 😀\n")) == "从前有 a boat 😀\n"
    assert tokenizer.decode_bytes(tokenizer.encode("😀")[-1:]) != "😀".encode()  # bytes, whole only together
    assert sum(tokenizer.token_bytes()) == sum(map(len, tokenizer.token_texts))


def test_what_begins_a_document_and_ends_a_reply(family_tokenizers):
    names = {}
    for family in KINDS:
        tokenizer = family_tokenizers[family]
        ends = [tokenizer.decode([index]) for index in tokenizer.reply_ends]
        names[family] = (tokenizer.decode([tokenizer.get_bos_token_id()]), ends)
    assert names == {
        "qwen2": ("<|endoftext|>", ["<|im_end|>", "<|endoftext|>"]),
        "llama3": ("<|begin_of_text|>", ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
        "mistral": ("<s>", ["</s>"]),
        "metaspace": ("<s>", ["</s>"]),
    }
    qwen = family_tokenizers["qwen2"]
    assert qwen.stop_ids == {qwen.special_ids["<|im_end|>"], qwen.special_ids["<|endoftext|>"]}
    think = qwen.encode("<think>")
    assert len(think) == 1 and think[0] > max(qwen.special_ids.values())  # special ids lie anywhere
    assert qwen.encode("", prepend="<|im_start|>") == [qwen.special_ids["<|im_start|>"]]
    assert qwen.decode([qwen.vocab_size + 5, *qwen.encode("a")]) == "a"  # the output layer may be wider


def test_the_words_of_qwen3_5_have_their_marks_and_its_ends_are_those_of_its_text_model(tmp_path):
    """Its tokenizer.json may have Qwen2's pattern: then its config's counts, as its class does for transformers."""
    auto = pytest.importorskip("transformers").AutoTokenizer
    folder = save_family(tmp_path / "model", "qwen3_5", chat_template="{{ messages[0].content }}")
    (folder / "generation_config.json").unlink()
    end = Tokenizer.load(folder).special_ids["<|endoftext|>"]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": {"eos_token_id": end}}))
    content = json.loads((folder / "tokenizer.json").read_text())
    split = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    pattern, split["Regex"] = split["Regex"], split["Regex"].replace(r"\p{M}", "")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pretokenize_regex": pattern}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.reply_ends == (tokenizer.special_ids["<|im_end|>"], end)
    oracle = auto.from_pretrained(folder)
    source = random.Random(2)
    texts = ["नमस्ते दुनिया", *(random_string(source).replace("<|", "") for _ in range(300))]
    assert [tokenizer.encode(text) for text in texts] == [oracle(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_file_holds_everything(family_tokenizers, tmp_path, family):
    tokenizer = family_tokenizers[family]
    assert [path.name for path in [tokenizer.save(tmp_path), *tmp_path.iterdir()]] == ["tokenizer.json"] * 2
    text = "Hello <|im_end|> 从前 <think>\n"
    for copy in (Tokenizer.load(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert copy.fingerprint() == tokenizer.fingerprint()
        assert copy.encode(text) == tokenizer.encode(text)
        assert (copy.reply_ends, copy.special_ids) == (tokenizer.reply_ends, tokenizer.special_ids)
        assert copy.chat_template.sources == {"default": FAMILIES[family]}
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["chat_templates"]["default"] += " "
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert "sha256" in complaint(lambda: Tokenizer.load(tmp_path))


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_fails_names_its_file(family_folders, tmp_path, file):
    folder = shutil.copytree(family_folders["qwen2"], tmp_path / "Qwen")
    source = "{{ raise_exception('not today') }}"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if file.endswith("json"):
        source = json.dumps({**json.loads((folder / file).read_text()), "chat_template": source})
    (folder / file).write_text(source)
    step = tmp_path / "sft" / "d1" / "step_000001"
    step.mkdir(parents=True)
    tokenizer = Tokenizer.load(folder)
    tokenizer.save(step)
    again = pickle.loads(pickle.dumps(Tokenizer.load(step)))
    for loaded, where in ((tokenizer, f"Qwen/{file}"), (again, "sft/d1/step_000001/tokenizer.json")):
        message = f"the chat template in {where} fails: not today"
        assert complaint(lambda loaded=loaded: loaded.chat_template.render([])) == message


def test_an_end_that_its_file_calls_plain_is_special(family_folders, tmp_path):
    content = json.loads((family_folders["qwen2"] / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text((family_folders["qwen2"] / "tokenizer_config.json").read_text())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 458}')
    tokenizer = Tokenizer.load(tmp_path)
    assert set(tokenizer.special_ids) == {"<|im_end|>", "<|endoftext|>"}
    assert not set(tokenizer.special_ids.values()) & set(tokenizer.encode("a<|im_end|>b<|endoftext|>"))


def test_normalizers_that_grow_are_one_line(family_folders, tmp_path):
    """Without the limit these take a text of a kilobyte to gigabytes."""
    folder = shutil.copytree(family_folders["qwen2"], tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    text = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    regex = {"type": "Replace", "pattern": {"Regex": "(?=.)"}, "content": "a" * 100}
    charsmap = base64.b64encode((4).to_bytes(4, "little") + b"trie" + b"a" * 3000 + b"\0").decode()
    for normalizer in (
        {"type": "Sequence", "normalizers": [text, {"type": "Sequence", "normalizers": [text] * 3}]},
        regex,
        {"type": "Prepend", "prepend": "a" * 100},
        {"type": "Precompiled", "precompiled_charsmap": charsmap},
    ):
        (folder / "tokenizer.json").write_text(json.dumps({**content, "normalizer": normalizer}))
        line = complaint(lambda: Tokenizer.load(folder))
        assert "cannot be used" in line and "times as long" in line and "\n" not in line
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, spaces]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(folder).vocab_size > 0


def test_a_regex_that_backtracks_is_one_line(family_folders, tmp_path):
    """The library panics, which is not even an Exception."""
    folder = shutil.copytree(family_folders["qwen2"], tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": r"(a+)+$|(a|aa)+\1b"}, "behavior": "Isolated", "invert": False}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_of]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(folder)
    line = complaint(lambda: tokenizer.encode("a" * 60 + "!"))
    assert "cannot encode a text" in line and "retry-limit" in line and "\n" not in line


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": "1.0", "model": 7}'),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": [], "merges": []}}'),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'),
        ("tokenizer.json", '{"version": 2, "sha256": "0"}'),
        ("tokenizer.json", '{"version": 2, "tokenizer": 1, "config": [], "chat_templates": "", "eos_token_ids": 3}'),
        ("tokenizer.json", '"model"'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": "nothing"}'),
        ("tokenizer_config.json", '{"eos_token": "<|im_end|>", "added_tokens_decoder": [1]}'),
        ("generation_config.json", '{"eos_token_id": "2"}'),
        ("generation_config.json", '{"eos_token_id": [99999999]}'),
        ("chat_template.jinja", "{% for x in %}"),
        ("chat_template.jinja", "{{ " + "(" * 5000 + ")" * 5000 + " }}"),
        ("chat_template.jinja", "x" * 500_000),
    ],
    ids=range(15),
)
def test_a_hostile_file_is_one_line(family_folders, tmp_path, file, content):
    for path in family_folders["qwen2"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_text(content)
    if content == '{"eos_token": "nothing"}':
        (tmp_path / "generation_config.json").unlink()
    assert "cannot be used" in complaint(lambda: Tokenizer.load(tmp_path))
