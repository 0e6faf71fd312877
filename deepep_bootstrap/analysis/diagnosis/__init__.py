"""Causes of failures named from logs by rules that are data. Read without any host or server.

Entry points: rules.shipped_causes, rules.load_causes (a site's own), engine.diagnose, engine.brief, outcomes.explained.

Must not know: CUDA, NICs or any cause by name: that is in env/rules/causes. Connections and the
prefix are others' business.
"""
