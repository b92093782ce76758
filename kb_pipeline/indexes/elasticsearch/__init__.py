"""Elasticsearch: ``layout`` says what lies on the server, ``bulk`` what is sent, ``failures`` what its answers mean."""
