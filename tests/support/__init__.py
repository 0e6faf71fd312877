"""What several tests need: labs, servers, prefixes, stand-in sources, recorded reports."""
