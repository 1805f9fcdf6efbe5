"""Tests of rewards, environments and programs before training, without a model."""
