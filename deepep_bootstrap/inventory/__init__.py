"""Hosts and what is known of them: the hosts file, the facts of each host, the NIC of each GPU, and the
network variables that follow from hardware and profile.

Entry points: survey.gather (facts of all hosts at the same time), hostsfile.read_hosts,
facts.parse_facts, network_env.derive.

Must not know: the lock, the network beyond the hosts, what a prefix offers, or what is to be done with a
host.
"""
