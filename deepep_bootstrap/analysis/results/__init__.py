"""Logs of tests in, figures and a verdict out, also where a log is cut, mixed or incomplete. Read without
any host or server.

Entry points: read.read_logs, model.document, text.lines.

Must not know: references, connections, the prefix, or where a log came from. Nothing in a log is trusted
to be whole.
"""
