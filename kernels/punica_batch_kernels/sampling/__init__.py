"""Choosing tokens on a GPU without waiting for it; what is meant: ``punica_batch.engine.sampler``."""
