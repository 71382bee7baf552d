"""Softmax attention on TPUs."""
