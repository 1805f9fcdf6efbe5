"""A small HTTP server with the routes of `vllm serve` that Podium uses, over a real tiny model.

It reads the checkpoints that it is told to, keeps a version with them, samples with torch, and can be made to
misbehave: for our handling of errors. What vLLM itself does is tested by test_vllm.py.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText


class StandIn:
    """`with StandIn(folder) as server: server.url`. Attributes may be changed while it runs."""

    def __init__(self, folder: str, **settings: Any) -> None:
        self.folder = folder
        self.version = "0.32.0"
        self.longest = 512
        self.development = True
        self.logprobs_mode = "processed_logprobs"
        self.dtype = "torch.float32"
        self.device = "cuda"
        self.extension = ""
        self.chunked_prefill = False
        self.masks = False
        """Whether it says which tokens a filter has left."""
        self.processor: Any = None
        """Of a model that reads images; None: of text alone."""
        self.lora_rank: int | None = None
        """The most that it takes; None: it was started without adapters."""
        self.delay = 0.0
        """Seconds before each completion."""
        self.die_after: int | None = None
        """Completions that are answered before it dies."""
        self.break_answer = lambda answer: answer
        self.after_completion = lambda: None
        self.requests: list[tuple[str, Any]] = []
        self.port = 0
        for name, value in settings.items():
            setattr(self, name, value)
        self.start()

    def start(self) -> None:
        """Anew: with the weights of its folder, on the same port."""
        self.model = self.loaded(self.folder)
        self.weight_version = "default"
        self.adapters: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.http = self._listening()
        self.http.server = self
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def loaded(self, folder: str) -> Any:
        """The model in a folder."""
        kind = AutoModelForCausalLM if self.processor is None else AutoModelForImageTextToText
        return kind.from_pretrained(folder, dtype=torch.float32)

    def _listening(self) -> Http:
        for _ in range(50):
            try:
                return Http(("127.0.0.1", self.port), Handler)
            except OSError:  # it is still dying
                time.sleep(0.1)
        return Http(("127.0.0.1", self.port), Handler)

    def stop(self) -> None:
        """As a process that is killed."""
        self.http.die()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- routes ----

    def answer(self, route: str, body: Any) -> Any:
        self.requests.append((route, body))
        known = {
            "/health": self.health,
            "/version": lambda _: {"version": self.version},
            "/v1/models": self.models,
            "/v1/completions": self.completions,
        }
        if self.development:
            known |= {
                "/server_info": self.info,
                "/weight_info": lambda _: {"weight_version": self.weight_version},
                "/update_weight_version": self.rename,
                "/collective_rpc": self.rpc,
                "/reset_prefix_cache": lambda _: {"success": True},
            }
        if self.processor is not None:
            known["/reset_encoder_cache"] = lambda _: {}
        if self.masks or self.processor is not None:
            known["/inference/v1/generate"] = self.generated
        if self.lora_rank is not None:
            known |= {"/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload_adapter}
        return known[route](body)

    def health(self, _: Any) -> Any:
        return {}

    def models(self, _: Any) -> Any:
        served = {"id": "tiny", "root": self.folder, "max_model_len": self.longest}
        return {"data": [served, *({"id": name, "parent": "tiny"} for name in self.adapters)]}

    def load_adapter(self, body: Any) -> Any:
        if body is None:
            raise PermissionError  # GET
        base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.adapters[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"])
        return "Success"

    def unload_adapter(self, body: Any) -> Any:
        del self.adapters[body["lora_name"]]
        return "Success"

    def info(self, _: Any) -> Any:
        model = {"logprobs_mode": self.logprobs_mode, "dtype": self.dtype, "max_model_len": self.longest}
        model |= {"return_sampling_mask": self.masks}
        others = {
            "weight_transfer_config": None,
            "lora_config": None if self.lora_rank is None else {"max_lora_rank": self.lora_rank},
            "device_config": {"device": self.device},
            "scheduler_config": {"enable_chunked_prefill": self.chunked_prefill},
            "parallel_config": {"worker_extension_cls": self.extension},
        }
        return {"vllm_config": {"model_config": model, **others}}

    def rename(self, body: Any) -> Any:
        self.weight_version = body["new_version"]
        return {"success": True}

    def rpc(self, body: Any) -> Any:
        if body["method"] == "podium_refresh":
            return {"results": ["1"]}
        assert body["method"] == "reload_weights"
        self.model = self.loaded(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def completions(self, body: Any) -> Any:
        assert not self.masks or (body.get("top_k", 0) > 0 and body["temperature"] > 0), "refused, as vLLM does"
        with self.lock:
            time.sleep(self.delay)
            if self.die_after is not None:
                if not self.die_after:
                    raise ConnectionError
                self.die_after -= 1
            made = self.judged if "prompt_logprobs" in body else self.choice
            choices = [made(body, g) for g in range(body.get("n", 1))]
            if not self.masks:
                choices = [{name: value for name, value in c.items() if name != "sampling_mask"} for c in choices]
            answer = self.break_answer({"choices": choices})
        self.after_completion()
        return answer

    @torch.no_grad()
    def choice(self, body: Any, g: int) -> dict[str, Any]:
        """One completion, with log-probabilities of the distribution that it was drawn from."""
        random = torch.Generator().manual_seed(body["seed"] + g)
        ids, logps, masks, told = list(body["prompt"]), [], [], []
        model = self.model if body["model"] == "tiny" else self.adapters[body["model"]]
        for _ in range(body["max_tokens"]):
            described = self.described(body, len(ids) - len(body["prompt"]))
            logits = model(torch.tensor([ids]), **described).logits[0, -1].float()
            for excluded, bias in body.get("logit_bias", {}).items():
                logits[int(excluded)] += bias
            logits = logits / (body["temperature"] or 1.0)
            if body["top_k"] > 0:
                logits[logits < logits.topk(body["top_k"]).values[-1]] = float("-inf")
            p = logits.softmax(-1)
            masks.append(logits.isfinite().nonzero()[:, 0].tolist())
            token = int(p.argmax() if body["temperature"] == 0 else torch.multinomial(p, 1, generator=random))
            ids.append(token)
            logps.append(float(p[token].log()))
            named = dict.fromkeys([token, *body.get("logprob_token_ids", [])])
            logp = logits.log_softmax(-1)
            told.append([{"token_id": i, "logprob": float(logp[i])} for i in named][: max(body["logprobs"], 1)])
            if token in body["stop_token_ids"]:
                break
        drawn = ids[len(body["prompt"]) :]
        said = {"token_logprobs": logps, "told": told}
        return {"index": g, "token_ids": drawn, "logprobs": said, "sampling_mask": masks}

    def described(self, body: Any, more: int) -> dict[str, Any]:
        """The fields of a request's images, and of its tokens and so many more."""
        of_tokens = (1, len(body["prompt"]))
        fields = body.get("fields", {})
        return {name: torch.nn.functional.pad(x, (0, more * (x.shape == of_tokens))) for name, x in fields.items()}

    def generated(self, body: Any) -> Any:
        """The same in the words of the other route, which takes images."""
        sampling = body["sampling_params"]
        assert sampling["output_kind"] == 2
        asked = sampling.get("logprob_token_ids")
        assert asked is None or sampling["logprobs"] == len(asked), "refused, as vLLM does"
        ids, fields = body["token_ids"], {}
        if body.get("content_parts"):
            ids, fields = self.expanded(ids, body["content_parts"])
        answer = self.completions({**sampling, "model": body["model"], "prompt": ids, "fields": fields})
        for choice in answer["choices"]:
            said = choice["logprobs"]
            drawn = zip(choice["token_ids"], said["token_logprobs"], said["told"], strict=True)
            content = [{"token_id": token, "logprob": logp, "top_logprobs": told} for token, logp, told in drawn]
            choice["logprobs"] = {"content": content}
        return {"prompt_token_ids": ids if body.get("return_token_ids") else None, **answer}

    def expanded(self, short_ids: list[int], parts: list[Any]) -> tuple[list[int], dict[str, Any]]:
        """Tokens with one for each feature of an image, and the fields of the forward, as Qwen2.5-VL has them."""
        placeholder = self.model.config.image_token_id
        text = self.processor.tokenizer.decode([placeholder])
        ids, made = [], []
        for token in short_ids:
            if token == placeholder:
                content = base64.b64decode(parts[len(made)]["url"].partition(",")[2])
                image = Image.open(io.BytesIO(content))
                made.append(self.processor(text=[text], images=[[image]], return_tensors="pt"))
            ids += made[-1]["input_ids"][0].tolist() if token == placeholder else [token]
        fields = {name: torch.cat([one[name] for one in made]) for name in ("pixel_values", "image_grid_thw")}
        return ids, {**fields, "mm_token_type_ids": (torch.tensor([ids]) == placeholder).long()}

    @torch.no_grad()
    def judged(self, body: Any, g: int) -> dict[str, Any]:
        """Log-probabilities of the prompt's tokens, keyed by their ids, at temperature 1; none of the first."""
        ids = torch.tensor(body["prompt"])
        logp = self.model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        own = logp.gather(1, ids[1:, None])[:, 0].tolist()
        told = [{str(id): {"logprob": x, "rank": 1}} for id, x in zip(body["prompt"][1:], own, strict=True)]
        return {"index": g, "prompt_logprobs": [None, *told]}


class Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    server: StandIn

    def die(self) -> None:
        """Listen no more."""
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Quietly: clients that go away are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    """JSON in, JSON out."""

    server: Any

    def do_GET(self) -> None:
        self.reply(None)

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["content-length"])) or b"null"))

    def reply(self, body: Any) -> None:
        try:
            answer, status = self.server.server.answer(self.path.partition("?")[0], body), 200
        except KeyError:
            answer, status = {"detail": "Not Found"}, 404
        except PermissionError:
            answer, status = {"detail": "Method Not Allowed"}, 405
        except ConnectionError:  # dies
            threading.Thread(target=self.server.die, daemon=True).start()  # not its successor, which may be there
            self.connection.close()
            return
        except Exception as error:  # noqa: BLE001  a server answers every error
            answer, status = {"error": {"message": str(error)}}, 500
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Not on the terminal."""
