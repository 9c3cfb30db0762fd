"""Packages that only rooms import, and the extra of pyproject.toml that installs each."""

EXTRAS = {
    "chat": "prompt_toolkit",
    "families": "jinja2 tokenizers",
    "hub": "huggingface_hub yaml",
    "report": "matplotlib",
    "samplers": "httpx2",
    "serve": "fastapi httptools llguidance prometheus_client pydantic starlette uvicorn uvloop",
    "service": "tinker",
    "modelscope": "modelscope",
    "ray": "ray",
    "track": "swanlab tensorboard wandb",
}


def advice(error: ImportError) -> str | None:
    """One line for a package of an extra that is not installed; None for any other error."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if isinstance(error, ModuleNotFoundError) and package in packages.split():
            command = f"`bash setup_ascend.sh --extras {extra}` or `pip install -e '.[{extra}]'`"
            return f"{package} is not installed: run {command}"
    return None
