"""Buffers of DeepEP V2.5, CPU stand-in."""
