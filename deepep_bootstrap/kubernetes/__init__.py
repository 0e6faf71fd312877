"""A stack for Kubernetes: manifests for its nodes, networks and tests, rendered from the same values as the
modulefile, and an image made of store entries.

Entry points: settings.read_settings, manifests.render, image.plan_image, image.make_image. Nothing here talks to a
cluster.

Must not know: the command line; who applies what is rendered.
"""
