"""Folders of the library peft, which hold the adapters of a Hugging Face model: in and out.

    adapter_config.json          the settings, and the place of the model to which they belong
    adapter_model.safetensors    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight (r, I) and so on

Source: the format of peft 0.21, which is the oracle of tests/adapters/test_peft.py.
"""

import math
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from nanochat import model_folder
from nanochat.adapters.lora import Adapters, Lora
from nanochat.families import hf
from nanochat.families.matrices import stacked_matrices
from nanochat.gpt import GPTConfig
from nanochat.ground import paths, rooms, storage
from nanochat.ground.cli import UserError
from nanochat.ground.untrusted import read_json, require_file
from nanochat.model_folder import MAX_NAME, find_folder, format_of

SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

UNREAD_EXPERTS = ("qwen2_moe", "qwen3_5_moe", "mixtral")  # peft 0.21 silently ignores adapters on these
ROUTED = ("mlp.input", "mlp.output")  # the modules that hold the matrices of all experts

# Settings of peft that give the stored numbers another meaning, or store further ones.
VARIANTS = (
    "use_dora", "use_qalora", "use_bdlora", "velora_config", "monteclora_config", "arrow_config", "kasa_config",
    "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices", "lora_bias", "target_parameters",
    "layer_replication", "alora_invocation_tokens",
)  # fmt: skip
# How peft began the adapters, where it left the weights of the base as they were. PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA
# change them: their adapters belong to another base than the one that the folder names.
PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def is_folder(path: Path) -> bool:
    """Whether a folder holds adapters as peft saves them, and no model."""
    return (path / SETTINGS).is_file() and not (path / "config.json").is_file()


def base_of(folder: Path) -> str:
    """The place of the model to which a folder's adapters belong: a path, or the name of a hub's repository."""
    return str(read_json(folder / SETTINGS).get("base_model_name_or_path"))


def find_base(folder: Path) -> Path:
    """The model that peft's adapters belong to: a path as it is or below our checkpoints, or a repository of a hub."""
    name = base_of(folder)[:MAX_NAME]
    for path in (Path(name).expanduser(), paths.base_dir() / "checkpoints" / name):
        if path.is_dir() and not is_folder(path):
            return find_folder(str(path))
    if name.count("/") != 1:
        raise UserError(
            f"{folder} holds adapters for {name}, which is not a model here: put the model there, or change "
            f"base_model_name_or_path in {SETTINGS}"
        )
    return find_folder(name if name.partition(":")[0] in rooms.names("hubs") else f"hf:{name}")


def require_same_modules(base: Path, flag: str) -> None:
    """Raises UserError: when our matrices are not the modules that transformers has for this base.

    A reader that derives from `hf.FolderFormat` may scale or stack weights as it reads them. Adapters of the result do
    not fit the original, and peft would apply them to it without an error.
    """
    reader = format_of(base)
    is_other = isinstance(reader, hf.FolderFormat) and reader is not hf.FORMAT
    if is_other or (reader is hf.FORMAT and hf.model_type(base) == "phi3"):
        raise UserError(
            f"{flag}: {base} has other matrices in transformers than here, so adapters do not carry over: "
            "export the merged model with --to hf"
        )


def require_whole_experts(lora: Lora, config: GPTConfig, family: str = "") -> None:
    """Raises UserError: for adapters on experts' matrices that peft does not read."""
    if set(lora.targets) & {"gate_proj", "up_proj", "down_proj"} and family in UNREAD_EXPERTS:
        raise UserError(
            f"--to peft: peft reads no adapters on the experts of {family}: export the merged model with --to hf, or "
            "train others (--lora_targets q_proj,k_proj,v_proj,o_proj)"
        )
    # peft 0.21 stacks gate and up of all experts. It refuses one of the two, and without down it ignores both.
    targets = [name for name in ("gate_proj", "up_proj", "down_proj") if config.experts and name in lora.targets]
    if targets and targets != ["down_proj"] and len(targets) < 3:
        raise UserError(
            f"--to peft: of the experts' matrices only {' and '.join(targets)} have adapters, which peft does not "
            "read: train gate_proj, up_proj and down_proj (--lora_targets), or export the merged model with --to hf"
        )


def names(config: GPTConfig) -> dict[str, tuple[str, str, int]]:
    """For each tensor that a folder can hold, by name: ours, the matrix that it adapts, and the expert's number. Ours
    holds the tensors of all experts, one below the other."""
    found = {}
    for layer in range(config.n_layer):
        for path in stacked_matrices(config):
            if path.startswith("attention") and ("state" in path) != (layer not in config.attention_layers):
                continue
            for theirs, _ in hf.theirs_of(f"blocks.{layer}.{path}.weight", config, 0):
                module = theirs.removesuffix(".weight")
                target = module.rpartition(".")[2]
                expert = int(module.split(".")[-2]) if config.experts and path in ROUTED else 0
                for side in ("lora_A", "lora_B"):
                    ours = f"blocks.{layer}.{path}.adapters.{target}.{side}"
                    found[f"base_model.model.{module}.{side}.weight"] = (ours, target, expert)
    return found


def write(folder: Path, adapters: Adapters, config: GPTConfig, base: str) -> None:
    """Write a folder's two files; `base` is where peft finds the model."""
    tensors = {}
    for theirs, (ours, _, expert) in names(config).items():
        if ours in adapters.tensors:
            experts = config.experts if config.experts and ours.split(".adapters")[0].endswith(ROUTED) else 1
            tensors[theirs] = adapters.tensors[ours].chunk(experts)[expert]
    storage.write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    lora = adapters.lora
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
        "target_modules": list(lora.targets), "bias": "none", "fan_in_fan_out": False,
    }  # fmt: skip
    storage.write_json(folder / SETTINGS, settings)


def read(folder: Path, config: GPTConfig) -> Adapters:
    """Adapters from a folder, for a base of this shape.

    Raises UserError: when they are of a kind that is not plain LoRA on the blocks' matrices, or of another model.
    """
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}: name a folder that peft has saved, with safetensors")
    settings = read_json(folder / SETTINGS)
    used = [name for name in VARIANTS if settings.get(name)]  # what is unset or empty changes nothing
    used += [f"bias {settings['bias']}"] if settings.get("bias", "none") != "none" else []
    if settings.get("init_lora_weights") not in PLAIN_INITS:
        used.append(f"init_lora_weights {str(settings['init_lora_weights'])[:80]}")
    if settings.get("peft_type") != "LORA" or used:
        kind = ", ".join(used) or settings.get("peft_type")
        raise UserError(f"{folder} is not plain LoRA ({kind}): merge it with peft, and name that model as --source")
    rank = settings.get("r")
    if not isinstance(rank, int) or rank < 1 or not isinstance(settings.get("lora_alpha"), int | float):
        raise UserError(f"{folder / SETTINGS} has no rank r above 0 or no lora_alpha: save it again with peft")
    require_file(folder / WEIGHTS)
    known = names(config)
    parts: dict[str, dict[int, Tensor]] = {}
    targets = set()
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for stored in file.keys():  # noqa: SIM118
            theirs = stored.replace(hf.SEEING_PREFIX, "model.")  # the names in a model that also sees
            if theirs not in known:
                raise UserError(
                    f"{folder} holds adapters for another model, or on other matrices than {', '.join(Lora.targets)}: "
                    f"{theirs[:200]}; name the base that they were trained on"
                )
            ours, target, expert = known[theirs]
            part = file.get_tensor(stored).to(torch.float32, copy=True)  # the file may change
            parts.setdefault(ours, {})[expert] = part
            targets.add(target)
    tensors = {ours: torch.cat([part for _, part in sorted(experts.items())]) for ours, experts in parts.items()}
    alpha = settings["lora_alpha"]
    if settings.get("use_rslora"):
        alpha *= math.sqrt(rank)  # rsLoRA's scale is alpha / sqrt(rank)
    in_order = tuple(name for name in Lora.targets if name in targets)
    adapters = Adapters(Lora(rank, alpha, settings.get("lora_dropout", 0.0), in_order), tensors)
    adapters.require_fit(config, str(folder))
    return adapters


class FolderFormat(model_folder.FolderFormat):
    """A folder of peft's. Its base describes the model, and has the weights."""

    def is_folder(self, path: Path) -> bool:
        return is_folder(path)

    def check(self, folder: Path, without_weights: bool = False) -> None:
        """Its adapters are read when they are loaded."""

    def find_base(self, folder: Path) -> Path | None:
        base = find_base(folder)
        require_same_modules(base, "peft's adapters")
        return base

    def weights_sha256(self, folder: Path) -> str:
        return storage.sha256(folder / WEIGHTS)


FORMAT = FolderFormat()
