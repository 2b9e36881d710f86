"""Weights that vLLM's reload leaves as they were: its warning is found, whatever it shows of its log."""

import inspect
import logging

import pytest

from rlctl.generation.vllm.weight_loader import LostWeights


@pytest.mark.parametrize("log_level", [logging.INFO, logging.ERROR])
def test_layers_that_a_reload_warns_of_are_collected_once(log_level: int) -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    message = "%s: Failed to load weights"
    assert f'logger.warning("{message}", layer.__class__.__name__)' in inspect.getsource(layerwise)
    logger = logging.getLogger(layerwise.__name__)
    level_before = logger.level
    handlers = list(logger.handlers)
    logger.setLevel(log_level)
    try:
        with LostWeights() as lost:
            for layer in ("OAIAttention", "RoutedExperts", "OAIAttention", "ParallelLMHead"):
                layerwise.logger.warning(message, layer)
            layerwise.logger.warning("Allocating %.1f MB of device memory", 1.0)
        layerwise.logger.warning(message, "RMSNorm")
        assert lost.layers == ["OAIAttention", "RoutedExperts"]
        assert (logger.level, logger.handlers) == (log_level, handlers)
    finally:
        logger.setLevel(level_before)
