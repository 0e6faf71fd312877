"""Processes as torch starts them, over the standard library."""

from .spawn import ProcessContext, ProcessExitedException, ProcessRaisedException, spawn, start_processes

__all__ = ["ProcessContext", "ProcessExitedException", "ProcessRaisedException", "spawn", "start_processes"]
