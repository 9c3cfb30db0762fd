"""Preferences, and RL beyond the core: losses, rewards and advantages."""

PLUGS = {
    "policy losses": {
        "reinforce": "nanochat.alignment.policy_losses:REINFORCE",
        "dr_grpo": "nanochat.alignment.policy_losses:DR_GRPO",
        "dapo": "nanochat.alignment.policy_losses:DAPO",
        "rloo": "nanochat.alignment.policy_losses:RLOO",
        "ppo": "nanochat.alignment.policy_losses:PPO",
        "gspo": "nanochat.alignment.policy_losses:GSPO",
        "cispo": "nanochat.alignment.policy_losses:CISPO",
        "distill": "nanochat.alignment.policy_losses:DISTILL",
    },
    "pair losses": {
        "dpo": "nanochat.alignment.pair_losses:DPO",
        "simpo": "nanochat.alignment.pair_losses:SIMPO",
        "orpo": "nanochat.alignment.pair_losses:ORPO",
        "reward": "nanochat.alignment.reward_model:REWARD",
    },
}
