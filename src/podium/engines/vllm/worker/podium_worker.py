"""An extension of vLLM's workers, for servers on a CPU: `--worker-extension-cls podium_worker.FreshHead`.

vLLM (seen in 0.32.0) computes linear layers on a CPU from copies of their weights, packed when they are loaded. A head
that is tied to the input embedding gets no weights of its own, so `reload_weights` leaves its copy as it was: logits
would come from the newest layers and the first head. Imports nothing of Podium, and vLLM only inside its workers.
"""

from __future__ import annotations

from typing import Any


class FreshHead:
    """Mixed into the worker class; methods are called by name."""

    get_model: Any

    def podium_refresh(self) -> int:
        """After `reload_weights`: pack the weights of output heads again; how many there are."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        heads = [module for module in self.get_model().modules() if isinstance(module, ParallelLMHead)]
        for head in heads:
            head.quant_method.process_weights_after_loading(head)
        return len(heads)
