"""The lock (deepep.lock.toml): read into frozen values, edited in place, and held to the rules of
compatibility. Read without any host or server.

Entry points: model.read_lock_file, edit.rewrite, compatibility.check_lock, packages.recipe_env.

Must not know: connections, servers, the file system beyond the lock's own file, or what is done with a
pin.
"""
