"""A run of a test, or a whole cluster, shown to people: one value, shown as tables on a terminal, as one HTML page,
and as JSON; and the archive for a bug report.

Entry points: load.read_run, compose.compose, cluster.compose_cluster, terminal.show_report, html.render_html,
bundle.pack.

Must not know: how a verdict is reached or a test is run. It judges nothing and changes nothing on hosts.
"""
