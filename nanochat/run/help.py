"""`--help` of the training scripts in groups; tyro lists flags in the order in which a script's classes add them."""

import re

# Every flag of every training script, in exactly one group, in the order in which they are shown.
GROUPS = {
    "model": """
        source source_tag depth head_dim window_pattern mlp experts experts_per_token expert_width
        shared_experts max_seq_len rope_scaling chat_template
        lora_rank lora_alpha lora_dropout lora_targets lora_base""",
    "data": """
        data val_data tasks columns thoughts hub shards val_share bad_records document_mask dataloader_num_workers""",
    "length": """
        num_iterations num_epochs target_param_data_ratio total_batch_size target_examples_per_step
        examples_per_step""",
    "samples": """
        num_samples max_tokens temperature top_k reward sampler sampler_patience staleness refills overlong""",
    "loss": """
        loss beta gamma label_smoothing sft_weight updates_per_step minibatches clip_low clip_high kl kl_in
        importance_cap teacher""",
    "learning rates": """
        lr_scale learning_rate optimizer matrix_lr weight_decay max_grad_norm
        lr_schedule warmup_ratio warmdown_fraction""",
    "saving": "model_tag save_every keep_last resume",
    "evaluation and log": "eval_every eval_tokens eval_examples log_every run track profile",
    "memory": """
        device_batch_size gradient_accumulation_steps parallel replicate context_parallel
        expert_parallel activation_checkpointing optimizer_dtype offload_optimizer dry_run dry_run_devices""",
    "device": "device dtype compile graphs deterministic seed hang_seconds",
}


def in_groups(text: str) -> str:
    """The help that tyro prints outside of a terminal, where all flags have one heading, with a heading for each group.

    A flag of somebody's own script may have no group: such flags come last.
    """
    head, *flags = re.split(r"(?m)^ options *\n -+ *\n", text)
    entries: dict[str, list[str]] = {}
    name = ""
    for line in "".join(flags).splitlines():
        flag = re.match(r" +(?:-h, )?--(\w+)", line)
        name = flag[1] if flag else name
        if line.strip():
            entries.setdefault(name, []).append(line.rstrip())
    shown = [head.rstrip(), "", *entries.pop("help", [])]
    groups = {group: names.split() for group, names in GROUPS.items()}
    known = {name for names in groups.values() for name in names}
    groups["other"] = [name for name in entries if name not in known]
    for group, names in groups.items():
        present = [entries[name] for name in names if name in entries]
        if present:
            shown += ["", f"{group}:"]
            for entry in present:
                shown += entry
    return "\n".join(shown).rstrip() + "\n"
