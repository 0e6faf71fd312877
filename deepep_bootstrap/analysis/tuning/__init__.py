"""Settings of DeepEP's kernels that a sweep found best: read from a run, merged with earlier ones, kept in
the prefix for programs.

Entry points: sweep.documents, sweep.merge, shelf.store, document.parse_document.

Must not know: how the test was run, verdicts, or reports. Only shelf takes a connection.
"""
