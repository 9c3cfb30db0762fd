"""Flags of ms-swift, LLaMA-Factory and TRL, and what does the same here: for a command line that has one of them.

docs/finetune.md has the same table, for reading; a test compares the two.
"""

# (their names, ours). Where a name is the same here, with the same meaning, it has no row.
TABLE = (
    ("model model_name_or_path", "--source hf:ORG/NAME, or a folder"),
    ("dataset dataset_name train_file", "--tasks FILE; in continue_train --data FILE"),
    ("template", "a model has its own chat template; another one: --chat_template FILE"),
    ("agent_template", "a model's chat template writes calls, too; another one: --chat_template FILE"),
    ("system", "there is no such flag in training: a row has its own, in its messages or a column system"),
    ("enable_thinking", "--thoughts keep or drop, of the replies in files"),
    ("streaming", "there is no such thing here: data are on this machine before a run"),
    ("max_length cutoff_len max_seq_length", "--max_seq_len"),
    ("split_dataset_ratio val_size", "--val_share"),
    ("train_type tuner_type finetuning_type use_peft", "--lora_rank N for adapters; without it all is trained"),
    ("lora_r", "--lora_rank"),
    ("target_modules lora_target lora_target_modules", "--lora_targets"),
    ("use_rslora", "--lora_rslora"),
    ("quant_bits quantization_bit load_in_4bit", "--lora_base nf4"),
    ("num_train_epochs", "--num_epochs"),
    ("max_steps", "--num_iterations"),
    ("per_device_train_batch_size", "--device_batch_size: rows, each with as many conversations as fit"),
    ("per_device_eval_batch_size", "--device_batch_size, of training and evaluation alike"),
    ("dataloader_num_workers", "only base_train, continue_train and mid_train have it"),
    ("packing", "rows are always packed, and their documents do not attend to each other"),
    ("lr_scheduler_type", "--lr_schedule linear, cosine or constant"),
    ("optim", "--learning_rate selects AdamW; without it Muon trains the matrices"),
    ("neftune_noise_alpha", "there is no such thing here"),
    ("bf16 fp16 torch_dtype", "--dtype bfloat16 or float32: of products; trained weights stay in float32"),
    ("attn_impl flash_attn attn_implementation", "the device decides, and the first lines of a run name it"),
    ("gradient_checkpointing", "--activation_checkpointing"),
    ("deepspeed fsdp", "--parallel fsdp divides all of the training state; --offload_optimizer"),
    ("sequence_parallel_size", "--context_parallel R, between processes that share each row"),
    ("expert_model_parallel_size", "--expert_parallel, with --parallel fsdp"),
    ("output_dir", "--model_tag TAG, below NANOCHAT_BASE_DIR"),
    ("save_steps", "--save_every"),
    ("save_strategy", "--save_every N, in steps; 0: only at the end"),
    ("save_total_limit", "--keep_last"),
    ("eval_steps", "--eval_every"),
    ("logging_steps", "--log_every"),
    ("resume_from_checkpoint", "--resume"),
    ("report_to", "--track"),
    ("run_name", "--run"),
    ("ddp_timeout", "--hang_seconds"),
    ("rlhf_type pref_loss loss_type", "--loss, of chat_dpo or chat_rl"),
    ("pref_beta", "--beta"),
    ("rpo_alpha pref_ftx", "--sft_weight, of chat_dpo"),
    ("num_generations", "--num_samples, of chat_rl"),
    ("max_completion_length", "--max_tokens, of chat_rl"),
    ("reward_funcs reward_model", "--reward FILE.py:FUNCTION or rm:SOURCE, of chat_rl"),
    ("epsilon", "--clip_low, of chat_rl"),
    ("epsilon_high", "--clip_high, of chat_rl"),
    ("steps_per_generation", "--minibatches, of chat_rl"),
    ("use_vllm vllm_mode", "--sampler http://HOST:PORT, of chat_rl"),
    ("adapters adapter_name_or_path", "--source FOLDER, which may hold adapters; of chat_web --adapter"),
    ("merge_lora export_dir", "python -m scripts.export --to hf"),
)  # fmt: skip


def flags() -> dict[str, str]:
    """What does the same here, by their flag."""
    found = {}
    for theirs, ours in TABLE:
        for name in theirs.split():
            found[f"--{name}"] = f"a flag of other trainers; here: {ours}"
    return found
