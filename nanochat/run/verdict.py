"""Whether a run learns: what is wrong with it, and advice that fits the cause."""

import math
from collections.abc import Iterator
from typing import Any

from nanochat.run.progress import CLEAR, FEW_STEPS, FLAT, SIGNS, Progress


def judge(run: Any) -> str:
    """`PROBLEM: ADVICE` by a Run's progress, flags, rates and model; "" where nothing is wrong."""
    progress, first, recent = run.progress, run.progress.first, run.progress.recent
    flags = run.config
    rate_flag = "--lr_scale" if hasattr(flags, "lr_scale") else "--matrix_lr"
    if getattr(flags, "adamw_rate", None) is not None:
        rate_flag = "--learning_rate"

    # ---- Causes come before their symptoms: at a rate of 0 no loss falls, and to lower the rate would be bad advice.
    # A step of AdamW or Muon moves a weight by about the rate, however small its gradient is.
    adapter = run.start.adapter
    scale = 1.0 if adapter is None else abs(adapter["alpha"] / adapter["rank"])
    move = run.last * run.optimizer.groups[0].learning_rate * scale
    if move < 1e-6:
        flag = rate_flag if scale > 0.01 else "--lora_alpha"
        return f"the blocks' weights can move by {move:.1g} at most in the whole run: raise {flag}"
    is_distilled = getattr(flags, "teacher", None) is not None
    if is_distilled and first.get("kl", 1.0) < 1e-3:
        return f"the teacher predicts the same as the student (KL {first['kl']:.0e}): name another --teacher"
    if progress.step < FEW_STEPS:
        return _symptom(progress, flags, rate_flag, is_final=False)
    # One odd reply in a hundred leaves 85% of groups of 16 without a signal.
    alike = min(first.get("no_signal", 0.0), recent.get("no_signal", 0.0))
    if alike > 0.8 and not is_distilled:
        advice = "take another --reward, --tasks or --source, or a higher --temperature, so that some are better"
        return f"all replies to {alike:.0%} of the questions are equally good: {advice}"
    loss = recent.get("loss", 0.0)
    if recent.get("updated", 1.0) < 0.1:
        advice = f"the weights have grown too large, lower {rate_flag} and begin again"
        if loss <= 0.01 * first.get("loss", 0.0):
            advice = "the data have no target, or none that is new, look at them by scripts.preview"
        return f"the last steps had no gradient, at a loss of {loss:.4f}: {advice}"
    # With 2 of 4 experts per token, a healthy run had a share of 0.44 and an entropy of 0.79; one that collapses, 0.5.
    share, entropy = recent.get("expert_max_share", 0.0), recent.get("expert_entropy", 1.0)
    shape = run.start.model.config
    least = math.log(shape.experts_per_token) / math.log(shape.experts) if shape.experts > 1 else 1.0
    if share > 0.75 or entropy < least + 0.3 * (1 - least):
        return f"an expert has {share:.0%} of the choices of its router: lower {rate_flag}, or use fewer experts"
    return _symptom(progress, flags, rate_flag, is_final=progress.step == run.last)


def _symptom(progress: Progress, flags: Any, rate_flag: str, is_final: bool) -> str:
    """What has become worse, or has not improved."""
    for name, sign, before, best, now, noise in compared(progress):
        is_now = f"{name} is {sign * now:.4f}, worse than"
        if now - before > max(noise, (FLAT if is_final else CLEAR) * abs(before)):
            return f"{is_now} {sign * before:.4f} at the beginning: {_advice(progress, flags, f'lower {rate_flag}')}"
        if now - best > max(noise, CLEAR * abs(best), 0.1 * (before - best)):
            return f"{is_now} {sign * best:.4f}, the best: {_advice(progress, flags, f'lower {rate_flag}')}"
        # With more noise an improvement could be hidden.
        if is_final and before - now < FLAT * abs(before) and noise < CLEAR * abs(before):
            moved = f"{sign * before:.4f} -> {sign * now:.4f}"
            return f"{name} has hardly moved ({moved}): {_advice(progress, flags, f'raise {rate_flag}')}"
    return ""


def compared(progress: Progress) -> Iterator[tuple[str, int, float, float, float, float]]:
    """What a run is to lower: the name, -1 for a reward, its value before the run, the best and the last one, and how
    much of their difference may be chance. Where nothing is held out, it is the training loss."""
    initial, evaluated, best = progress.initial or {}, progress.evaluated or {}, progress.best or {}
    for name, sign in SIGNS.items():
        if name in evaluated and f"{name}_before" in initial:
            error = math.hypot(initial.get(f"{name}_error_before", 0.0), evaluated.get(f"{name}_error", 0.0))
            yield name, sign, sign * initial[f"{name}_before"], sign * best[name], sign * evaluated[name], 3 * error
    if not evaluated and "loss" in progress.first and "reward" not in progress.recent:
        before, now, noise = progress.training_loss()
        yield "the training loss", 1, before, min(before, now), now, noise


def _advice(progress: Progress, flags: Any, change: str) -> str:
    """To `change` the rate, unless there is another cause."""
    norm = getattr(flags, "largest_norm", None)
    if norm is not None and norm < 1e-3:
        return f"raise --max_grad_norm, gradients are clipped to {norm:g}"
    before, now = min(progress.first.get(name, 0.0) for name in ("opening", "loss")), progress.recent.get("loss", 0.0)
    if now < (1 - CLEAR) * before and "reward" not in progress.recent:
        return "the training loss has fallen, train on more data or for fewer steps"
    if abs(progress.recent.get("accuracy", 1.0) - 0.5) < 0.1:
        return f"the pairs may be random or nearly alike, look at them by scripts.preview, or {change}"
    return f"{change}, or look at the data"
