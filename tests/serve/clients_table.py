"""The table of clients and calls in docs/deploy.md: drives each client, unmodified, against a tiny model.

    pip install -e ".[clients]" && npm install ai @ai-sdk/openai-compatible zod
    python tests/serve/clients_table.py

A call that works returns a City or a reply that ended, or fulfils its own assertions. A call that is refused gets a 400
that names the field, which the table shows. tests/serve/test_clients.py runs the same calls; those of clients that are
not installed are skipped.
"""

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "docs/deploy.md", ROOT / "docs/deploy.zh.md")
MODEL = "tiny"
CONTEXT = 4096  # clients write schemas into messages, and a token of the tiny tokenizer is a byte
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class City(pydantic.BaseModel):
    """Of random weights neither field has an end; the server sees to it within MAX_TOKENS."""

    name: str
    size: int


MAX_TOKENS = 80
CITY_TOOL = {"name": "city", "description": "Find a city", "parameters": City.model_json_schema()}
TOOLS: list[Any] = [{"type": "function", "function": CITY_TOOL}]


@dataclass(frozen=True)
class Call:
    client: str
    package: str  # whose version the table shows
    call: str
    run: Callable[[str], Any]
    refused: str = ""  # the field that the refusal names; empty: it works

    @property
    def is_installed(self) -> bool:
        if self.package == "ai":
            return ai_sdk_version() is not None
        modules = {"openai-agents": "agents", "pydantic-ai-slim": "pydantic_ai"}
        return importlib.util.find_spec(modules.get(self.package, self.package.replace("-", "_"))) is not None

    @property
    def version(self) -> str:
        return ai_sdk_version() or "" if self.package == "ai" else importlib.metadata.version(self.package)


# ---------------------------------------------------------------------- openai


def client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=url, api_key="any", max_retries=0)


def chat(url: str, **settings: Any) -> Any:
    return client(url).chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "max_tokens": MAX_TOKENS, **settings}
    )


def reply(**settings: Any) -> Callable[[str], Any]:
    return lambda url: chat(url, **settings).choices[0]


def openai_stream(url: str) -> Any:
    return list(chat(url, stream=True))[-1].choices[0]


def openai_completion(url: str) -> Any:
    return client(url).completions.create(model=MODEL, prompt="a", max_tokens=4).choices[0]


def openai_object(url: str) -> None:
    assert chat(url, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")


def openai_parse(url: str) -> City:
    settings: Any = {"model": MODEL, "messages": HELLO, "max_tokens": MAX_TOKENS}
    return client(url).chat.completions.parse(response_format=City, **settings).choices[0].message.parsed


def openai_auto(url: str) -> None:
    assert chat(url, tools=TOOLS, tool_choice="auto").choices[0].message.tool_calls is None


def openai_required(url: str) -> City:
    (call,) = chat(url, tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    return City.model_validate_json(call.function.arguments)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


# ---------------------------------------------------------------------- the others


def instructor_create(mode: str) -> Callable[[str], Any]:
    def run(url: str) -> Any:
        import instructor

        patched = instructor.from_openai(client(url), mode=getattr(instructor.Mode, mode))
        return patched.chat.completions.create(
            model=MODEL, messages=HELLO, response_model=City, max_retries=0, max_tokens=MAX_TOKENS
        )

    return run


def langchain_model(url: str, max_tokens: int) -> Any:
    from langchain_openai import ChatOpenAI

    settings: Any = {"api_key": "any", "max_retries": 0, "max_tokens": max_tokens}
    return ChatOpenAI(model=MODEL, base_url=url, **settings)


def langchain(method: str) -> Callable[[str], Any]:
    return lambda url: langchain_model(url, MAX_TOKENS).with_structured_output(City, method=method).invoke("hello")


def langchain_stream(url: str) -> None:
    assert list(langchain_model(url, 20).stream("hello"))


def agents(url: str) -> None:
    import agents
    import openai

    called: list[str] = []

    @agents.function_tool
    def find_city(name: Literal["Bern", "Rome"]) -> str:
        """Find a city."""
        called.append(name)
        return "found"

    settings = agents.ModelSettings(tool_choice="required", max_tokens=60)

    async def go() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as connection:
            model: Any = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=connection)
            agent = agents.Agent(
                "finder", instructions="Find it.", model=model, tools=[find_city], model_settings=settings
            )
            return await agents.Runner.run(agent, "hello", max_turns=3)

    agents.set_tracing_disabled(True)
    result = asyncio.run(go())
    assert called in (["Bern"], ["Rome"]) and isinstance(result.final_output, str)


def pydantic_ai(is_native: bool) -> Callable[[str], Any]:
    def run(url: str) -> Any:
        from pydantic_ai import Agent, NativeOutput
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        profile: Any = {"supports_json_schema_output": True} if is_native else None
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="any"), profile=profile)
        output: Any = NativeOutput(City) if is_native else City
        return Agent(model, output_type=output, model_settings={"max_tokens": MAX_TOKENS}).run_sync("hello").output

    return run


def litellm_completion(url: str, **settings: Any) -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks another host for prices
    import litellm

    settings |= {"api_base": url, "api_key": "any", "num_retries": 0, "max_tokens": MAX_TOKENS}
    answer: Any = litellm.completion(model=f"openai/{MODEL}", messages=HELLO, **settings)
    return litellm.stream_chunk_builder(list(answer)) if settings.get("stream") else answer


def litellm_format(url: str) -> City:
    answer = litellm_completion(url, response_format=City)
    return City.model_validate_json(answer.choices[0].message.content)


def litellm_tools(url: str) -> City:
    answer = litellm_completion(url, tools=TOOLS, tool_choice="required", stream=True)
    return City.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)


AI_SDK = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, tool } from "ai";
import { z } from "zod";
const [call, baseURL] = process.argv.slice(1);
const provider = createOpenAICompatible({ name: "nanochat", baseURL, supportsStructuredOutputs: true });
const model = provider("tiny");
const schema = z.object({ name: z.string(), size: z.number().int() });
let result;
if (call === "object") {
  result = (await generateObject({ model, schema, prompt: "hello", maxRetries: 0, maxOutputTokens: 80 })).object;
} else {
  const tools = { city: tool({ description: "Find a city", inputSchema: schema }) };
  const reply = await generateText({ model, tools, toolChoice: "required", prompt: "hello", maxRetries: 0,
    maxOutputTokens: 80 });
  result = reply.toolCalls[0].input;
}
console.log(JSON.stringify(schema.parse(result)));
"""


def node_folder() -> Path:
    """The folder with node_modules: NANOCHAT_NODE, or the project's."""
    return Path(os.environ.get("NANOCHAT_NODE", ROOT))


def ai_sdk_version() -> str | None:
    package = node_folder() / "node_modules/ai/package.json"
    return json.loads(package.read_text())["version"] if shutil.which("node") and package.exists() else None


def ai_sdk(call: str) -> Callable[[str], City]:
    def run(url: str) -> City:
        command = ["node", "--input-type=module", "-e", AI_SDK, call, url]
        done = subprocess.run(command, cwd=node_folder(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return City.model_validate_json(done.stdout)

    return run


CALLS = (
    Call("openai", "openai", "`chat.completions.create`", reply()),
    Call("openai", "openai", "`chat.completions.create(stream=True)`", openai_stream),
    Call("openai", "openai", "`completions.create`", openai_completion),
    Call("openai", "openai", "`response_format` `json_object`", openai_object),
    Call("openai", "openai", "`chat.completions.parse`", openai_parse),
    Call("openai", "openai", "`tools`, `tool_choice` `auto`", openai_auto),
    Call("openai", "openai", "`tools`, `tool_choice` `required`", openai_required),
    Call("openai", "openai", "images in a message", reply(messages=[{"role": "user", "content": [IMAGE]}]), "type"),
    Call("openai", "openai", "`functions`, before there were tools", reply(functions=[CITY_TOOL]), "functions"),
    Call("instructor", "instructor", "`Mode.TOOLS`", instructor_create("TOOLS")),
    Call("instructor", "instructor", "`Mode.JSON_SCHEMA`", instructor_create("JSON_SCHEMA")),
    Call("LangChain", "langchain-openai", '`with_structured_output(method="json_schema")`', langchain("json_schema")),
    Call(
        "LangChain", "langchain-openai",
        '`with_structured_output(method="function_calling")`', langchain("function_calling"),
    ),
    Call("LangChain", "langchain-openai", "`stream`", langchain_stream),
    Call("OpenAI Agents", "openai-agents", "tools, `OpenAIChatCompletionsModel`", agents),
    Call("Pydantic AI", "pydantic-ai-slim", "`Agent(output_type=...)`", pydantic_ai(is_native=False)),
    Call("Pydantic AI", "pydantic-ai-slim", "`NativeOutput`", pydantic_ai(is_native=True)),
    Call("LiteLLM", "litellm", "`completion(response_format=...)`", litellm_format),
    Call("LiteLLM", "litellm", "`completion(tools=..., stream=True)`", litellm_tools),
    Call("AI SDK", "ai", "`generateObject`", ai_sdk("object")),
    Call("AI SDK", "ai", "`generateText`, `toolChoice` `required`", ai_sdk("tools")),
)  # fmt: skip


# ---------------------------------------------------------------------- server and table


@contextmanager
def server() -> Iterator[str]:
    """The address of the API of a tiny model with random weights."""
    import tiny
    from fake_server import serving

    from nanochat.engine import Engine
    from nanochat.sampling import SamplingParams
    from nanochat.serve.app import create_app
    from nanochat.serve.scheduler import Scheduler
    from nanochat.serve.state import LoadedModel

    tokenizer = tiny.tiny_tokenizer()
    model = tiny.lively_model(tiny.tiny_config(vocab_size=tokenizer.vocab_size, sequence_len=CONTEXT, n_layer=1))

    def load() -> LoadedModel:
        scheduler = Scheduler(Engine(model, tokenizer, tiny.cpu_device()), slots=2)
        scheduler.start()
        sampling = SamplingParams(temperature=0.8)
        return LoadedModel(scheduler, tokenizer, MODEL, CONTEXT, chats=True, sampling=sampling)

    with serving(create_app(load)) as port:
        yield f"http://127.0.0.1:{port}/v1"


def outcome(call: Call, url: str) -> str:
    """`works`, or the field that a refusal names. Raises what else the client raises."""
    import openai

    try:
        got = call.run(url)
    except openai.BadRequestError as error:
        return (error.param or "").rpartition(".")[2]
    assert got is None or isinstance(got, City) or got.finish_reason in ("stop", "length"), got
    return "works"


def row(call: Call, version: str) -> str:
    """A line of the table; `{works}` and `{refused}` stand for what each language writes."""
    result = "{works}" if not call.refused else f"{{refused}} (`{call.refused}`)"
    return f"| {call.client} {version} | {call.call} | {result} |"


WORDS = ({"works": "works", "refused": "refused"}, {"works": "可用", "refused": "拒绝"})
HEADS = ("| client | call | |\n|---|---|---|\n", "| 客户端 | 调用 | |\n|---|---|---|\n")
TABLE = re.compile(r"(?<=<!-- clients -->\n).*?(?=<!-- /clients -->)", re.DOTALL)


def write(rows: list[str]) -> None:
    """Put the rows into both documents."""
    for path, words, head in zip(DOCUMENTS, WORDS, HEADS, strict=True):
        table = head + "".join(line.format(**words) + "\n" for line in rows)
        before, after = TABLE.split(path.read_text())
        path.write_text(before + table + after)


def main() -> None:
    rows = []
    with server() as url:
        for call in CALLS:
            if not call.is_installed:
                sys.exit(f"{call.package} is not installed: see the top of this file")
            found = outcome(call, url)
            print(f"{call.client} {call.version}: {call.call}: {found}", flush=True)
            if found != (call.refused or "works"):
                sys.exit("this is not what CALLS says: change the server or CALLS")
            rows.append(row(call, call.version))
    write(rows)


if __name__ == "__main__":
    main()
