-- Which channel was told of which alert. A channel is named by a fingerprint: its address is a secret, and is not stored.

CREATE TABLE kb_alert_channel (
    channel text PRIMARY KEY,
    token   bigint NOT NULL DEFAULT 0,               -- of the process that sends to it: one at a time, so that nothing is sent twice
    until   timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 50);

CREATE TABLE kb_alert_delivery (
    alert_id         bigint NOT NULL REFERENCES kb_alert ON DELETE CASCADE,
    channel          text NOT NULL,
    sent_at          timestamptz NOT NULL DEFAULT clock_timestamp(),  -- that it is open, or still is
    resolved_sent_at timestamptz,
    PRIMARY KEY (alert_id, channel)
);
CREATE INDEX kb_alert_delivery_open ON kb_alert_delivery (channel, alert_id) WHERE resolved_sent_at IS NULL;
