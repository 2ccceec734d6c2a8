-- Two token buckets in one hash, filled continuously: requests and tokens a minute.
-- KEYS[1]: the tenant's hash.
-- ARGV: requests a minute, tokens a minute (0: unlimited), requests wanted, tokens wanted, 1 to take them unasked.
-- Settling takes unasked: a negative amount gives back what was not used, a positive one is spent already, as a debt.
-- Returns {allowed, requests left, tokens left, ms until the requests are full, same for tokens, ms to wait}.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local state = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local elapsed = math.max(0, now - (tonumber(state[3]) or now))

local allowed, wait = 1, 0
local left, full_in = {}, {}
for i = 1, 2 do
  local limit, wanted = tonumber(ARGV[i]), tonumber(ARGV[i + 2])
  if limit == 0 then
    left[i], full_in[i] = 0, 0
  else
    local per_ms = limit / 60000
    local have = math.min(limit, (tonumber(state[i]) or limit) + elapsed * per_ms)
    if ARGV[5] ~= '1' and have < wanted then
      allowed = 0
      wait = math.max(wait, math.ceil((wanted - have) / per_ms))
    end
    left[i] = have
  end
end
for i = 1, 2 do
  local limit, wanted = tonumber(ARGV[i]), tonumber(ARGV[i + 2])
  if limit > 0 then
    if allowed == 1 then left[i] = math.min(limit, left[i] - wanted) end
    full_in[i] = math.ceil((limit - left[i]) / (limit / 60000))
  end
end
redis.call('HSET', KEYS[1], 'requests', left[1], 'tokens', left[2], 'at', now)
redis.call('PEXPIRE', KEYS[1], 120000)
return { allowed, math.floor(left[1]), math.floor(left[2]), full_in[1], full_in[2], wait }
