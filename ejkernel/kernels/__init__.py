"""Implementations: the registry, the shared problem definitions and one package per platform."""
