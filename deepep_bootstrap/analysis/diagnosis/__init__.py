"""Causes of failures named from logs by rules that are data. Read without any host or server.

Entry points: rules.load_causes, engine.diagnose, engine.brief, outcomes.explained.

Must not know: CUDA, NICs or any cause by name: that is in env/rules/causes.toml. Connections and the
prefix are others' business.
"""
